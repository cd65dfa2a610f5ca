"""The contracts: Protocols that plugins keep, and the small records that go with them."""
