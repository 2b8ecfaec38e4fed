// The least a test needs: EXPECT stops the program with the text of what does not hold.
#pragma once

#include <cstdio>
#include <cstdlib>

#define EXPECT(condition)                                                          \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                               \
    }                                                                              \
  } while (false)
