"""SmolLM2, on which everything is shown; a stand-in for GPT-OSS made of it; draft heads for it."""
