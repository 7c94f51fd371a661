"""What ``llamapipe chat`` is made of.

``conversation`` holds the messages. ``reader`` reads them from a terminal or a pipe. ``session`` answers them and runs
the commands of the conversation.
"""
