"""The data sets of reasoning-gym as environments."""
