"""Whether this machine, and a config on it, is ready for a run: `whet doctor [CONFIG]`."""
