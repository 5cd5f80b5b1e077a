// A backup with a supply of host memory of its own.
#pragma once

#include "replay/cycle/backup.h"

namespace amem::test {

struct LoneOptions {
  Bytes chunk = Bytes{16} << 20, scan = BackupOptions{}.scan, batch = BackupOptions{}.batch;
  std::chrono::milliseconds quiet{0};
  Bytes prepare_limit = Bytes{4} << 30;
  double dense = BackupOptions{}.dense;
  bool compare = false;
  unsigned without_copy = 0;
  std::shared_ptr<const ContentKey> key{};
};

struct LoneSupply {
  PinnedSupply supply;
};

class LoneBackup : private LoneSupply, public Backup {
 public:
  explicit LoneBackup(Copier& copier, const LoneOptions& options = {})
      : LoneSupply{{copier,
                    {.chunk = options.chunk, .quiet = options.quiet, .nccl_limit = options.prepare_limit, .key = options.key}}},
        Backup(copier, supply,
               {.scan = options.scan,
                .batch = options.batch,
                .dense = options.dense,
                .compare = options.compare,
                .without_copy = options.without_copy}) {}
  void Prepare(Bytes expected) { supply.Want({}, expected); }
  void StopPreparing() { static_cast<void>(supply.StopPreparing()); }
  void Trim(Bytes keep) { supply.Trim(keep); }
  [[nodiscard]] Bytes pinned_bytes() const { return supply.Count().pinned_bytes; }
};

}  // namespace amem::test
