#pragma once

#include "CoreMinimal.h"

class FPaths {
  public:
    static FString ProjectContentDir() { return TEXT("/nowhere/Content/"); }
    static FString ProjectSavedDir() { return TEXT("/nowhere/Saved/"); }
    static FString ConvertRelativePathToFull(const FString &Path) { return Path; }
    static FString ConvertRelativePathToFull(const FString &Base, const FString &Path) {
        if (**Path == u'/') {
            return Path;
        }
        FString Full = Base;
        Full += Path;
        return Full;
    }
};
