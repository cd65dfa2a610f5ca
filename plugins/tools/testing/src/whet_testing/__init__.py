"""What the tests of a plugin need: contracts to inherit, fakes that obey them, and fixtures."""
