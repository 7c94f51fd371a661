"""What was written on the command line.

``parser`` reads the options of a command. ``hints`` knows what other programs call them. ``texts`` reads prompts from
arguments, files and standard input. Nothing here loads a model.
"""
