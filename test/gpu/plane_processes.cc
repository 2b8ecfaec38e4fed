// The conformance suite over the GPU plane with one process per rank, all on device 0:
// mpirun -np N plane_processes MPI_PLUGIN. The GPU: FARANDOLE_CUDA_PLUGIN. With
// FARANDOLE_SHARE_GPU=1 over NCCL, else staged. Exits 1, and says why, if any rank fails.
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/gpu/backend_selection.h"
#include "test/conformance/data_plane_rank.h"
#include "test/conformance/data_plane_reference.h"
#include "test/gpu/mpi_rank.h"
#include "test/gpu/plug_in.h"

namespace farandole {
namespace {

int Fail(const Status& status) {
  std::printf("FAILED to start: %s\n", status.ToString().c_str());
  return 1;
}

// Equal members' results have equal fingerprints; 0 stands for a result that was dropped.
std::string CompareFingerprints(Transport& transport, const std::vector<uint64_t>& mine) {
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * 8);
  const Result<std::vector<std::string>> all = transport.Allgather(bytes, 60 * kNsPerSecond);
  if (!all.ok()) return all.status().ToString();
  for (size_t i = 0; i < mine.size(); ++i) {
    for (const std::string& theirs : all.value()) {
      if (theirs.size() != bytes.size()) return "a member failed";
      uint64_t value = 0;
      theirs.copy(reinterpret_cast<char*>(&value), 8, 8 * i);
      if (value != 0 && mine[i] != 0 && value != mine[i]) {
        return "the members' bits of case " + std::to_string(i) + " differ";
      }
    }
  }
  return {};
}

std::string RunCases(MpiRank& rank) {
  MpiRuntime& mpi = rank.mpi();
  const bool over_nccl = SharesGpu() && NcclVersionHere() >= kNcclOfSharedGpus;
  std::vector<PlaneCase> cases = AllPlaneCases(mpi.size());
  std::erase_if(cases, [](const PlaneCase& c) { return !c.slots.empty(); });  // not on a GPU
  if (over_nccl) cases = InAnyOrder(std::move(cases));
  MirrorPlane plane(GpuRuntime(), 0, std::move(rank.host), GpuPlaneHere(rank.bell));
  std::vector<uint64_t> fingerprints;
  std::string wrong =
      RunCasesOnRank(plane, rank.bell, GlobalSet(mpi.rank(), mpi.size()), cases, &fingerprints);
  if (!wrong.empty()) fingerprints.clear();
  const std::string differ = CompareFingerprints(*rank.transport, fingerprints);
  if (wrong.empty()) wrong = differ;
  if (wrong.empty() && mpi.rank() == 0) {
    std::printf("ok: %zu cases on %d ranks, %s\n", cases.size(), mpi.size(),
                over_nccl ? "NCCL" : "staged");
  }
  return wrong;
}

int Main(int argc, char** argv) {
  if (argc < 2) return 2;
  Result<std::unique_ptr<MpiRank>> joined = JoinMpi(argv[1]);
  if (!joined.ok()) return Fail(joined.status());
  MpiRank& rank = *joined.value();
  const std::string wrong = RunCases(rank);
  if (!wrong.empty()) {
    std::printf("FAILED on rank %d: %s\n", rank.mpi().rank(), wrong.c_str());
    std::fflush(stdout);
    rank.mpi().Abort(1);
  }
  if (Status s = rank.Leave(); !s.ok()) return Fail(s);
  return 0;
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) { return farandole::Main(argc, argv); }
