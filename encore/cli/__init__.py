"""The command line, one module per topic; app.py imports the one that is asked for.

A command's docstring is its help and ends with examples. What several commands take is in options.py.
"""
