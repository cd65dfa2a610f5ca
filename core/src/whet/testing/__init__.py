"""The conformance kit: contracts to inherit, fakes that obey them, and tiny models."""
