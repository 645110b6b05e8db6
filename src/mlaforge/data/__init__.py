"""Text to rows: windows of tokens, what two texts share, packed documents."""
