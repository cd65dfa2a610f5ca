"""The path of requests to generators: dispatch over replicas, their health, and external engines."""
