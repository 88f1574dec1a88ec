"""python -m truedraw"""

from truedraw.cli.main import main

main()
