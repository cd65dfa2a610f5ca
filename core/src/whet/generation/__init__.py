"""Requests on their way to generators: dispatch over replicas, their health, and engines that others wrote."""
