// AMEM_NETWORK=renew: what a pause asks of network cards, it asks of those that NCCL uses itself and of its plugins.
#include <vector>

#include "ncclpatch/intercept/cards.h"
#include "ncclpatch/intercept/plugin_handles.h"
#include "ncclpatch/nccl/attribution.h"

namespace amem::intercept {
namespace {

// Each does nothing about the other's registrations.
class AllNetworks final : public Network {
 public:
  std::vector<Kept> Drain(const std::vector<RegionId>& regions, Deadline until) override {
    std::vector<Kept> kept = cards_.Drain(regions, until), of_plugins = plugins_.Drain(regions, until);
    kept.insert(kept.end(), of_plugins.begin(), of_plugins.end());
    return kept;
  }
  Status Deregister(RegionId region) override {
    AMEM_TRY(cards_.Deregister(region));
    return plugins_.Deregister(region);
  }
  Status Register(RegionId region) override {
    AMEM_TRY(cards_.Register(region));
    return plugins_.Register(region);
  }
  void Open() override {
    cards_.Open();
    plugins_.Open();
  }

 private:
  Cards& cards_ = Forever<Cards>();
  PluginHandles& plugins_ = Forever<PluginHandles>();
};

}  // namespace

Network* Renew() {
  Forever<Cards>().Begin();
  Forever<PluginHandles>().Begin();
  static auto* const tables = new std::vector(Tables().begin(), Tables().end());
  tables->push_back(CountedCardReplacements());
  static const replacements::Tables all(*tables);
  replacements::Install(all);
  nccl::TellServiceThreads();
  nccl::SetEnding([](CommunicatorId id, bool begins) { Forever<Cards>().Ending(id, begins); });
  return &Forever<AllNetworks>();
}

}  // namespace amem::intercept
