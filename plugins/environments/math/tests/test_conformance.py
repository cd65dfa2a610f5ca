from whet.testing.contracts.component import ComponentContract


class TestPlugin(ComponentContract):
    hooks = "whet_env_math.hooks"
    documents = {"math": {"dataset": {"train": "train.jsonl"}}}  # noqa: RUF012 - so says the contract
