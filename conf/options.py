"""The command line of the tools: their own options besides overrides of the configuration."""

import sys
from collections.abc import Sequence

from conf.cli import with_home
from conf.errors import UserError


def parse_options(
    usage: str | None, arguments: Sequence[str], **options: str | None
) -> tuple[dict[str, str], list[str]]:
    """Split arguments `key=value` into a tool's own options and overrides of the configuration.

    Args:
        usage: text that `--help` prints.
        arguments: arguments of the command line.
        options: defaults by key; an option whose default is None is required.

    Returns:
        The values of the options, and all other arguments.

    Raises:
        UserError: an argument has another form, or an option is missing.
    """
    if {"-h", "--help"} & set(arguments):
        print(usage)
        sys.exit()
    given, others = dict(options), []
    for number, argument in enumerate(map(with_home, arguments)):
        key, equals, value = argument.partition("=")
        if not equals or argument.startswith("-"):
            raise UserError(
                f"{' '.join(arguments[: number + 1])}: {argument} is not key=value, without dashes "
                "and without spaces in lists; --help shows examples"
            )
        if key in given:
            given[key] = value
        else:
            others.append(argument)
    missing = [f"{key}=" for key, value in given.items() if value is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} missing from the command line; --help shows examples"
        )
    return {key: str(value) for key, value in given.items()}, others
