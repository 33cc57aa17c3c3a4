"""Predictions and exercises: the reader chooses or writes an answer, and learns why it is right or wrong."""

from three_axes.doors import door

__getattr__, __dir__ = door(
    __name__,
    books=[
        "BUILD",
        "LATER",
        "Written",
        "answering",
        "drop_number",
        "exercises",
        "module_of",
        "notebooks",
        "read_book",
        "solutions_hidden",
        "write_book",
        "written",
    ],
    cards=["Card", "load"],
    defence=["Defence"],
    diagnose=["Illegal", "idle", "read", "run"],
    engine=["Asked", "OnRanks", "Run", "WrongForm"],
    exercise=["Answer", "Exercise", "line", "names_in", "predict", "right", "wrong"],
    onward=["next_drop", "where"],
    passed=["Done", "beside", "mine", "read_progress"],
    progress=["advice_to", "leave"],
    quiz=["NAMES", "Quiz", "STORIES"],
    runs=["Run", "alike", "facts_so_far", "first", "hear", "needs_more", "noting_help", "number"],
    seen=["multiple"],
)
