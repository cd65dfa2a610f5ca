"""The testing kit for plugins: contracts to inherit, fakes that obey the contracts, and fixtures."""
