"""What this machine holds of an artifact: fetching the parts a span needs, checking and freeing them."""
