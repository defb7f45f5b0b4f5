"""Launch, health and diagnosis of a server."""
