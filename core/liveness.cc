#include "core/liveness.h"

namespace farandole {

std::string RankName(int rank) { return "rank " + std::to_string(rank); }

// The peer comes first, as an error of this end names it.
Status LostConnection(int peer, int self, const std::string& what, const std::string& why) {
  return FailedOn(peer, Unavailable(RankName(peer) + " and " + RankName(self) + " lost their " +
                                    what + " (" + why + ")"));
}

}  // namespace farandole
