"""The course as pages of HTML, in build/site: to look at before anything is installed, or to publish.

Drops with their stored outputs, slides, cards, the cheat sheet, the documents. Nothing is fetched from any
network, so the pages also open from a folder. Formulas are plain text, as in the drops. What answers a
prediction stays folded until the reader has chosen. The explorers of schedules and memory work without a
kernel, from frames that the simulator has made before.
"""
