"""The command line, one module per topic; app.py lists the commands.

A command's docstring is its help, and EPILOG its examples. What several commands take is in options.py. A function
imports for itself what would make every command start slower: scipy, matplotlib, and what needs them.
"""
