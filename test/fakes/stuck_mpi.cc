// Preloaded into a rank (LD_PRELOAD): MPI_Testall does not return while the file named by
// FARANDOLE_TEST_STUCK_MPI is there. Beside it, ".stuck" appears once a call has met it, and
// ".returned" once that call is over.
#include <mpi.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace {

void Touch(const std::string& path) { std::ofstream{path}; }

void WaitWhileStuck() {
  static const char* const path = std::getenv("FARANDOLE_TEST_STUCK_MPI");
  if (path == nullptr || access(path, F_OK) != 0) return;
  Touch(std::string(path) + ".stuck");
  while (access(path, F_OK) == 0) usleep(1000);
  Touch(std::string(path) + ".returned");
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int MPI_Testall(int count, MPI_Request requests[],
                                                                  int* flag,
                                                                  MPI_Status statuses[]) {
  WaitWhileStuck();
  return PMPI_Testall(count, requests, flag, statuses);
}
