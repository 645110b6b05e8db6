"""Text data: token windows, overlap between texts, packed documents."""
