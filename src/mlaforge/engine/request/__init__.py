"""One request from prompt to answer: its sequences, its text, where it ends, what is handed out."""
