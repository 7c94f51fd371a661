"""SQLite files that all processes of a server share: answers, conversations, clients' files and background work.

In each process one thread writes to a file and others read it. This package knows no requests.
"""
