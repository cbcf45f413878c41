"""Settings for all tests."""

from hypothesis import settings

# A slow machine is no failure of what is tested.
settings.register_profile("scidata", deadline=None)
settings.load_profile("scidata")
