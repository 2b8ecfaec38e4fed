// The smallest program: every rank contributes its number, all get the mean.
//
//   g++ -std=c++17 allreduce.cc $(pkg-config --cflags --libs farandole) -o allreduce
//   mpirun -np 2 ./allreduce
#include <farandole/context.h>

#include <cstdio>
#include <vector>

int main() try {
  farandole::Context context = farandole::Context::init();
  std::vector<float> mean = {static_cast<float>(context.rank())};
  context.allreduce(mean);
  std::printf("rank %d of %d: mean %.2f\n", context.rank(), context.size(),
              static_cast<double>(mean[0]));
  return 0;
} catch (const farandole::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
