"""Values that note what a policy reads of them."""

from torchremat.policies.policy import Value


class NotedValue(Value):
    """A value that notes whether something reads which module ran it."""

    @classmethod
    def of(cls, value: Value, reads: set[str]) -> "NotedValue":
        """`value`, which adds to `reads` where it is read."""
        noted = object.__new__(cls)
        vars(noted).update(vars(value), _reads=reads)
        return noted

    @property
    def module(self) -> str:
        vars(self).get("_reads", set()).add("module")
        module: str = vars(self)["module"]
        return module

    @module.setter
    def module(self, name: str) -> None:  # of a copy that `dataclasses.replace` makes
        vars(self).update(module=name)
