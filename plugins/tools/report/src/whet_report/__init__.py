"""A run folder as one HTML page that needs nothing but a browser: `whet report RUN`."""
