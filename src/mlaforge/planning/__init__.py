"""Cost before doing: cache and FLOP arithmetic, what a machine can do with it, plans on disk."""
