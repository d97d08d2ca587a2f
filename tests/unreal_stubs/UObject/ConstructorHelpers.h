#pragma once

#include "CoreMinimal.h"

struct ConstructorHelpers {
    template <class T> struct FObjectFinder {
        explicit FObjectFinder(const TCHAR *) {}
        T *Object = nullptr;
    };
};
