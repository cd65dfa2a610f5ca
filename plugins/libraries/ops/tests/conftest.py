from hypothesis import settings

# How long an example takes says more of what else the machine does than of a formula.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
