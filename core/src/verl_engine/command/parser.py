"""How each of core's own commands reads its arguments."""

import argparse


def command_parser(program: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Make a parser whose help keeps the line breaks of its texts, and that takes no abbreviated options."""
    return argparse.ArgumentParser(
        program,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
