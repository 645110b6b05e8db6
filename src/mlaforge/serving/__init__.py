"""Serving over HTTP and in the terminal: the application, its protocol and limits, chat, generate."""
