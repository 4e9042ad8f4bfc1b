"""The server: HTTP in one process, the engine in another, a durable queue between them (docs/serving.md)."""
