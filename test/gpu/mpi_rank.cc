#include "test/gpu/mpi_rank.h"

#include <utility>

#include "core/plugin_loader.h"
#include "ops/cpu/kernels.h"
#include "ops/p2p/plane.h"

namespace farandole {

Result<std::unique_ptr<MpiRank>> JoinMpi(const std::string& plugin) {
  static const Services services{&SteadyClock(), &BestCpuKernels(), nullptr};
  auto rank = std::make_unique<MpiRank>();
  Result<Backends> backends = LoadPlugin({plugin, ""}, services);
  if (!backends.ok()) return backends.status();
  rank->backends = std::move(backends).value();
  FARANDOLE_RETURN_IF_ERROR(rank->mpi().Init());
  const LinkOptions options{&rank->bell, nullptr, &rank->counters, 60 * kNsPerSecond};
  Result<std::unique_ptr<Transport>> transport = rank->mpi().CreateTransport(options);
  if (!transport.ok()) return transport.status();
  rank->transport = std::move(transport).value();
  Result<std::unique_ptr<DataPlane>> host = CreateP2pPlane(rank->mpi(), options, BestCpuKernels());
  if (!host.ok()) return host.status();
  rank->host = std::move(host).value();
  return rank;
}

Status MpiRank::Leave() {
  host = nullptr;
  transport = nullptr;
  return mpi().Finalize();
}

}  // namespace farandole
