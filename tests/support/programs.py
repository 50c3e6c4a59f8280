"""Compiled forwards without the compiler: what it is given is run as it is."""

from typing import ClassVar

from draftsmith.decode.cache import program


class Traced(program.Program):
    """A program that runs what was exported: a second in place of ten."""

    made: ClassVar[list[tuple[object, tuple]]] = []

    def __init__(self, model, forward, example, weights):
        self._forward = self.prepared(forward, example, weights)
        self.made.append((model, forward.key))

    def prepared(self, *args):
        return program.export_program(*args).module(check_guards=False)

    def use(self, weights):
        raise NotImplementedError

    def __call__(self, *inputs):
        return self._forward(*inputs)


class Untraced(Traced):
    """A program that runs what would be traced."""

    def prepared(self, forward, example, weights):
        return forward
