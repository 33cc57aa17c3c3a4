"""Makes the course as pages of HTML, in build/site: to read without an installation, or to publish.

There are pages for drops with their stored outputs, slides, cards, the cheat sheet and the documents. They
fetch nothing from a network, so they also open from a folder. The answer to a prediction is folded until the
reader has chosen. The explorers (pictures with sliders) of two orders, of schedules and of memory work
without a kernel: their frames are computed beforehand.
"""
