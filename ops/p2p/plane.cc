#include "ops/p2p/plane.h"

#include <array>
#include <utility>

#include "ops/cpu/quantize.h"
#include "ops/p2p/collective.h"

namespace farandole {
namespace {

/// By OpKind, of which CheckBatch refuses later ones; the last two are for small batches of some
/// kinds, and for quantized ones that are not small.
using Factory = std::unique_ptr<P2pCollective>();
constexpr Factory* kFactories[] = {MakeP2pAllreduce,     MakeP2pBroadcast, MakeP2pAllgather,
                                   MakeP2pReducescatter, MakeP2pAlltoall,  MakeP2pSmallGather,
                                   MakeP2pQuantized};
constexpr size_t kSmallGather = std::size(kFactories) - 2;
constexpr size_t kQuantized = kSmallGather + 1;
static_assert(kSmallGather == static_cast<size_t>(OpKind::kAlltoall) + 1);

class P2pPlane final : public DataPlane {
 public:
  P2pPlane(const char* name, P2pLinkFactory links, const CpuKernels& kernels, Counters* counters)
      : name_(name), links_(std::move(links)), kernels_(kernels), counters_(counters) {}

  const char* name() const override { return name_; }
  bool quantizes() const override { return true; }

  /// A set may share its number with one that was removed on other members already: `earlier`.
  Status AddSet(uint32_t uid, std::span<const int> ranks, int my_index) override {
    auto set = std::make_unique<P2pSet>(uid, ranks, my_index, kernels_, counters_);
    for (const auto& [other_uid, other] : sets_) {
      if (other->SharesNumberWith(uid)) set->earlier = other.get();  // the last of them
    }
    sets_.Add(std::move(set));
    return Status();
  }

  /// Sets with the same number form a chain; one that waited for the ended set waits for what that
  /// one waited for.
  void RemoveSet(uint32_t uid) override {
    const P2pSet* const ended = sets_.Find(uid);
    for (const auto& [other_uid, other] : sets_) {
      if (ended != nullptr && other->earlier == ended) other->earlier = ended->earlier;
    }
    sets_.Remove(uid);
  }

  Result<PlaneOperation*> Start(const Batch& batch) override {
    Result<P2pSet*> set = sets_.For(batch);
    if (!set.ok()) return set.status();
    FARANDOLE_RETURN_IF_ERROR(set.value()->Open(links_));
    const size_t which = GatherPlan::Suits(batch) ? kSmallGather
                         : IsQuantized(batch)     ? kQuantized
                                                  : static_cast<size_t>(batch.kind);
    return pools_[which].Take(kFactories[which])->Enqueue(batch, *set.value(), pools_[which]);
  }

 private:
  const char* const name_;
  const P2pLinkFactory links_;
  const CpuKernels& kernels_;
  Counters* const counters_;
  CpuSets<P2pSet> sets_;
  std::array<CpuCollective::Pool, std::size(kFactories)> pools_;
};

}  // namespace

std::unique_ptr<DataPlane> MakeP2pPlane(const char* name, P2pLinkFactory links,
                                        const CpuKernels& kernels, Counters* counters) {
  return std::make_unique<P2pPlane>(name, std::move(links), kernels, counters);
}

Result<std::unique_ptr<DataPlane>> CreateP2pPlane(Network& network, const LinkOptions& options,
                                                  const CpuKernels& kernels) {
  Result<P2pLinkFactory> links = network.CreateLinks(options);
  if (!links.ok()) return links.status();
  return MakeP2pPlane(network.name(), std::move(links).value(), kernels, options.counters);
}

}  // namespace farandole
