from whet_testing.contracts.component import ComponentContract


class TestPlugin(ComponentContract):
    hooks = "whet_sandbox.hooks"
