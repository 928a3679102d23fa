"""Properties with a few examples in every run of the suite, and with many in a slow test."""

import inspect

import pytest
from hypothesis import given, settings

FEW = 15


def holds(many, **strategies):
    """As hypothesis' `given`, with FEW examples, and with `many` in a slow test."""

    def decorate(check):
        others = [name for name in inspect.signature(check).parameters if name not in strategies]

        def run(num_examples, **chosen):
            @settings(max_examples=num_examples, deadline=None)
            @given(**strategies)
            def one(**drawn):
                check(**chosen, **drawn)

            one()

        run.__name__, run.__doc__, run.__module__ = check.__name__, check.__doc__, check.__module__
        names = ["num_examples", *others]
        run.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        sizes = [FEW, pytest.param(many, marks=pytest.mark.slow)]
        return pytest.mark.parametrize("num_examples", sizes)(run)

    return decorate
