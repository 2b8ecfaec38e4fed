// The planes that the program `conformance` tests: all that need no GPU and no launcher.
#include "test/conformance/data_plane_backends.h"
#include "test/conformance/data_plane_cuda_backends.h"

namespace farandole {

std::vector<PlaneParam> PlanesUnderTest() {
  std::vector<PlaneParam> planes = BackendsInOneProcess();
  for (const PlaneParam& plane : CudaBackendsOnFakes()) planes.push_back(plane);
  return planes;
}

}  // namespace farandole
