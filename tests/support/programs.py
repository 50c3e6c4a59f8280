"""Compiled forwards without the compiler: what it is given is run as it is."""

from typing import ClassVar

from draftsmith.decode.cache import program


class Traced(program.Program):
    """A program that runs what was exported: a second in place of ten."""

    made: ClassVar[list[tuple[object, program.Variant]]] = []

    def __init__(self, model, variant, written, example, weights):
        self._forward = self.prepared(model, variant, written, example, weights)
        self.made.append((model, variant))

    def prepared(self, *args):
        return program.exported(*args).module(check_guards=False)

    def use(self, weights):
        raise NotImplementedError

    def _run(self, *inputs):
        return self._forward(*inputs)


class Untraced(Traced):
    """A program that runs what would be traced."""

    def prepared(self, model, variant, written, example, weights):
        return program.BlockForward(model, variant, written)
