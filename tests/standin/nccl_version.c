// The part of NCCL's library that says which version it is: its function, and the text in its file.
const char text[] = "NCCL version " TEXT "+cuda13.0";

int ncclGetVersion(int* version) {
  *version = NUMBER;
  return 0;
}
