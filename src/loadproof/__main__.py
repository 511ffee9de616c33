"""``python -m loadproof`` is ``loadproof``."""

from loadproof.cli import main

main()
