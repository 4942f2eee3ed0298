"""llama.cpp's ``--fit``: a plan before loading, whose margin, order of sacrifice and buffers are restated here.

One logged start is at hand (a pool and its states); everything else was read from source and threads, and says so.
"""
