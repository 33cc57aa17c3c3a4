"""Makes the course as pages of HTML, in build/site, to read before anything is installed, or to publish.

There are pages for drops with their stored outputs, slides, cards, the cheat sheet and the documents. They
fetch nothing from a network, so they also open from a folder. Formulas are plain text, as in the drops. The
answer to a prediction is folded until the reader has chosen. The explorers of schedules and memory work
without a kernel: their frames are computed beforehand.
"""
