from whet_profile.config import ProfileConfig
from whet_profile.profile import Profile
from whet_testing.contracts.component import ComponentContract
from whet_testing.contracts.hooks import HooksContract


class TestPlugin(ComponentContract):
    hooks = "whet_profile.hooks"


class TestProfile(HooksContract):
    def make(self, run):
        return Profile(ProfileConfig(steps=[2], roles=["backend", "critic"]), run)
