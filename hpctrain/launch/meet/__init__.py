"""How ranks find each other, and how one that is lost is named."""
